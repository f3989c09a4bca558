"""The tap inside an app: middlewares that tell a meter what a relay in front of the app would tell it."""
