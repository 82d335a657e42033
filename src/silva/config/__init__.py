"""Options: the table, and how command line and TOML become a checked RunConfig."""
