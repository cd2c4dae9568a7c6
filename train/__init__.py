"""Training: the functions :func:`fit`, :func:`evaluate` and :func:`serve`, the commands, and the embedded trainer."""

from groundwire.train.api.functions import evaluate, fit, keep_functions
from groundwire.train.api.serving import serve

__all__ = ["evaluate", "fit", "serve"]

keep_functions(__name__)
