"""The judge: scores an answer in prose against a reference, by a model or by rules, or abstains."""
