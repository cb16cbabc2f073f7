"""Read dumps: archives, XML tables and parquet files of the hub."""
