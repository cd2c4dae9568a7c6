"""Rewards for BIRD (Li et al., NeurIPS 2023): execution accuracy, Soft F1 and efficiency."""
