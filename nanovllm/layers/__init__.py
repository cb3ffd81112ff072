"""The modules a model is made of: parameters, their sharding over ranks, and which op to call."""
