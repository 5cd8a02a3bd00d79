"""What there is: methods, tasks, the policy."""
