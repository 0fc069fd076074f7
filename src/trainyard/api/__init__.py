"""The functions of `import trainyard`, also used by the command line."""
