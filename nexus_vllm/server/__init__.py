"""The HTTP side: directives in, reports and metrics out."""
