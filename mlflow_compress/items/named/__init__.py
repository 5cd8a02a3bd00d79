"""Named tasks, one file per task, registered in `items.named_tasks`."""
