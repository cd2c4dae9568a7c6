"""What is learned: gold queries, chats or accepted rollouts, as token ids."""
