"""What a run leaves: its folder, metrics, checkpoints and summaries."""
