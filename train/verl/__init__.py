"""Training on GPUs with verl and vLLM. Nothing outside this package imports verl, Ray or TransferQueue."""
