"""In which order the contractions of a program are done."""
