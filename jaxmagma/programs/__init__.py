"""What one element computes, as a sequence of operations on tiles."""
