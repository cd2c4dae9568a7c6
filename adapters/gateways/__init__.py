"""Scripted conversations through real SDKs, to see what a gateway in front of a policy does to the tokens."""
