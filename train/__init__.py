"""Training: the functions :func:`fit`, :func:`evaluate` and :func:`serve`, the commands, and the embedded trainer."""

from groundwire.train.api.functions import evaluate, fit, serve
from groundwire.train.api.package import keep_functions

__all__ = ["evaluate", "fit", "serve"]

keep_functions(__name__)
