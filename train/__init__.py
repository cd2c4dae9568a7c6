"""Training: the functions that do what the commands do, the commands, and the embedded trainer."""

from groundwire.train.api.functions import evaluate, fit, keep_functions, look
from groundwire.train.api.serving import serve
from groundwire.train.notebook import learn, read_traces, replay, report, sft, why

__all__ = ["evaluate", "fit", "learn", "look", "read_traces", "replay", "report", "serve", "sft", "why"]

keep_functions(__name__)
