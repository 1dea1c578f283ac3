"""Reports of plans: one page of HTML, and the same as Markdown."""
