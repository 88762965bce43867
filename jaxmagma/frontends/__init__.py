"""From equations and functions of one element to programs."""
