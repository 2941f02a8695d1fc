"""Records to network buffers and back: keys, partitioners, elements, partitions, gates, pools."""
