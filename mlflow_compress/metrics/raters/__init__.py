"""What people and judges say of answers: preferences, and how far raters agree."""
