"""What fits, what it costs: closed forms, and a trace of the real step without hardware."""
