"""Discovery: the leading worker enters instances that it finds, and takes out those that are gone."""
