"""Models of other people: their folders, GGUF files and the hub, and checks of their files."""
