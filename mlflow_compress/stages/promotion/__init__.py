"""Parts of a promotion: candidates with what a policy reads of them, the files of a decision, the alias's history."""
