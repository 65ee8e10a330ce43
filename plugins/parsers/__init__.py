"""Tool parsers: the formats in which models write tool calls."""
