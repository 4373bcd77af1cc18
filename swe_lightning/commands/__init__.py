"""The commands of `swel`, one module per noun. Each is a thin call into a room, imported when the command runs."""
