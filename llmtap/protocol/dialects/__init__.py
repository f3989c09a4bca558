"""One file per dialect: what an event of that stream says. How to add one: ADDING.md."""
