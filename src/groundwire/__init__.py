"""Train the model behind your own agent: trace its LLM calls, turn them into triplets, update the policy with GRPO.

The packages are the repository's top-level folders: links here lead to them in a clone, and a wheel has them inside
this package. Import them as ``groundwire.adapters``, ``groundwire.tools`` and so on.
"""

from groundwire.tools.interrupts import end_at_interrupt, is_program

if is_program():
    end_at_interrupt()
