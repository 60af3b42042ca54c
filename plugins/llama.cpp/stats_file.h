#pragma once
// LOWKV_STATS=path: what each cache of this process holds, as a text file in Prometheus' exposition
// format. It is replaced as a whole, within a second of each step, and stays when the process has
// ended.

namespace lowkv::ggml {

struct LiveBuffer;

// Takes the buffer's figures and writes the file, at once or when the last file is a second old.
// Only for the thread that computes on the buffer, since nobody else may read what it holds; of the
// process's other caches the file repeats the figures that their own threads took last.
void write_stats_if_due(const LiveBuffer& buffer);

// The same, due or not: the buffer is about to be freed.
void write_last_stats(const LiveBuffer& buffer);

}  // namespace lowkv::ggml
