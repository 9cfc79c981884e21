"""What a run says: findings, whether outputs were written exactly once, the timeline, and what was
exercised."""
