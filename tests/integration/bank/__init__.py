"""A bank of right and wrong schedules of six real models, and what slapo says of each of them."""
