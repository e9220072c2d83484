"""The HTML report of a run: its frame and its charts. Each task adds sections of its own."""
