"""The agents in examples/frameworks: each in an environment of its own, checked against a scripted policy, trained."""
