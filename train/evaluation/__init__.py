"""What a model can do under an agent, measured with the trainer's own rollouts.

Everything that is said of an evaluation is made from its rows, which are those of a training run: so training runs can
be measured, tabled and compared in the same way, also long after.
"""
