"""Where samples come from: one file a kind of source, each with its configuration."""
