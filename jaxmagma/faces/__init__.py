"""What tells users about a call."""
