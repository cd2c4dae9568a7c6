from process_agents import agent, server

__all__ = ["agent", "server"]
