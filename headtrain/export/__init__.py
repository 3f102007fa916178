"""Export a trained head for an engine, prove the folder, and check it against a target."""
