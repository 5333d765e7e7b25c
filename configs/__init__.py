"""Presets: one TOML file per model and machine, headed by the command that runs it."""
