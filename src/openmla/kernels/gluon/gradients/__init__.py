"""What dense backward passes of Gluon families share: work items, statistics, sums, launches."""
