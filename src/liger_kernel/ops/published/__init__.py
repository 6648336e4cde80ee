"""Names and signatures of the published package that are not our own: each is a few lines over
an operator."""
