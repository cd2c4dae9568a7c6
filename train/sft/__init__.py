"""Supervised fine-tuning: a warm start for reinforcement learning, from gold answers, chats or accepted rollouts."""
