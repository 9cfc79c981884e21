"""What a run says: findings, whether outputs were written exactly once, and the timeline."""
