"""The chat completion API of the policy server: requests, responses, and the chat templates of models."""
