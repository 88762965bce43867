"""What becomes of a plan before its steps are stages."""
