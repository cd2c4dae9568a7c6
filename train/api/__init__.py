"""Training, evaluation and serving as functions: the commands and the functions of a script run the same code."""
