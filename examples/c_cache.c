/* The C interface: a model's cache that is filled, attended to, forked, packed and saved. A model would project the
 * numbers; here they are made up. */
#include <lowkv/lowkv.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { layers = 2, kv_heads = 2, heads = 8, head_dim = 64, prompt = 1000 };

static float *numbers(size_t count) {
    float *out = malloc(count * sizeof *out);
    if (out == NULL) exit(1);
    for (size_t i = 0; i < count; ++i) out[i] = (float)(rand() % 2001 - 1000) / 500.0f;
    return out;
}

static void must(lowkv_status status) {
    if (status == LOWKV_OK) return;
    fprintf(stderr, "lowkv: %s\n", lowkv_error());
    exit(1);
}

/* One query token over all that layer 0 holds. */
static void attend(lowkv_cache *cache, lowkv_sequence sequence, const float *q, float *out) {
    lowkv_attention one = {.size = sizeof one, .sequence = sequence, .tokens = 1, .heads = heads, .q = q, .out = out,
                           .causal = 1};
    one.q_head_stride = one.out_head_stride = head_dim;
    one.q_token_stride = one.out_token_stride = heads * head_dim;
    must(lowkv_attend(cache, 0, &one, 1, NULL));
}

static double cosine(const float *a, const float *b) {
    double dot = 0, aa = 0, bb = 0;
    for (int i = 0; i < heads * head_dim; ++i) {
        dot += (double)a[i] * b[i];
        aa += (double)a[i] * a[i];
        bb += (double)b[i] * b[i];
    }
    return dot / sqrt(aa * bb);
}

int main(void) {
    lowkv_config config = {.size = sizeof config, .scheme = "lowkv4,window=64", .layers = layers, .kv_heads = kv_heads,
                           .head_dim = head_dim};
    lowkv_cache *cache = NULL;
    lowkv_sequence chat, branch, restored;
    must(lowkv_cache_new(&config, &cache));
    must(lowkv_sequence_add(cache, &chat));

    float *keys = numbers((size_t)prompt * kv_heads * head_dim), *values = numbers((size_t)prompt * kv_heads * head_dim);
    float *q = numbers(heads * head_dim), exact[heads * head_dim], packed[heads * head_dim];
    const lowkv_rows k = {keys, LOWKV_DTYPE_F32, kv_heads * head_dim, head_dim};
    const lowkv_rows v = {values, LOWKV_DTYPE_F32, kv_heads * head_dim, head_dim};
    for (uint32_t layer = 0; layer < layers; ++layer) must(lowkv_append(cache, chat, layer, k, v, prompt));

    attend(cache, chat, q, exact);
    must(lowkv_pack(cache)); /* after the last layer: packs what has left the window */
    attend(cache, chat, q, packed);
    const double near = cosine(exact, packed);

    lowkv_bytes bytes;
    must(lowkv_cache_bytes(cache, &bytes));
    printf("lowkv %s: %d tokens in %.1f KiB packed and %.1f KiB unquantized, attention within %.4f of before\n",
           lowkv_version(), prompt, (double)bytes.packed / 1024, (double)bytes.unquantized / 1024, 1 - near);

    must(lowkv_sequence_fork(cache, chat, &branch)); /* shares all blocks */
    must(lowkv_sequence_truncate(cache, branch, 500));

    void *data = NULL;
    size_t size = 0;
    must(lowkv_save(cache, chat, &data, &size));
    must(lowkv_load(cache, data, size, &restored));
    attend(cache, restored, q, exact);
    const int same = cosine(exact, packed) > 0.9999999;
    printf("saved in %.1f KiB, and %s after a restore\n", (double)size / 1024, same ? "the same" : "DIFFERENT");

    config.scheme = "lowkv9"; /* refused, in words */
    lowkv_cache *none = NULL;
    const int refused = lowkv_cache_new(&config, &none) == LOWKV_INVALID_SCHEME;
    printf("refused: %s\n", lowkv_error());

    lowkv_free(data);
    lowkv_cache_free(cache);
    free(keys);
    free(values);
    free(q);
    return same && refused && near > 0.98 ? 0 : 1;
}
