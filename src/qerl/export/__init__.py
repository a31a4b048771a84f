"""What is trained here, for use elsewhere: `run` is what the command calls, `merge` the weights it writes."""
