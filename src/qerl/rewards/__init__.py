"""What rewards are computed with where comparing answers does not do: programs in a sandbox, a judge."""
