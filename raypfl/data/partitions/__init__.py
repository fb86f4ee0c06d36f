"""How samples are dealt to clients: one file a family, each with its configuration and its source."""
