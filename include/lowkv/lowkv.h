/* lowkv's C interface: the packed key/value cache of a whole model.
 *
 * A cache has the layers of one model and any number of sequences. A step of an engine, for each
 * layer: lowkv_append() the new tokens' keys and values, lowkv_attend() with their queries; after
 * the last layer lowkv_pack(). Newest tokens stay unquantized as the scheme says (window=, sinks=),
 * so a step attends to its own tokens exactly.
 *
 * Functions that can fail return a lowkv_status, change nothing where they do (but lowkv_pack(),
 * which may have packed some layers), and leave a message for lowkv_error(). None prints, exits or
 * throws. One thread at a time may use a cache; different caches are independent.
 * examples/c_cache.c is a complete program. C99, and C++. */
#ifndef LOWKV_LOWKV_H
#define LOWKV_LOWKV_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(LOWKV_SHARED_BUILD)
#define LOWKV_API __declspec(dllexport)
#elif defined(__GNUC__) && !defined(_WIN32)
#define LOWKV_API __attribute__((visibility("default")))
#else
#define LOWKV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Rises where a function or a structure changes its meaning. New members come at a structure's end,
 * behind its size. */
#define LOWKV_API_VERSION 1

/* NOLINTBEGIN(modernize-use-using): it is C. */

typedef enum lowkv_status {
    LOWKV_OK = 0,
    LOWKV_INVALID_SCHEME = 1,
    LOWKV_INVALID_ARGUMENT = 2,
    LOWKV_UNSUPPORTED = 3, /* legal, but not in this build, on this CPU or through this interface */
    LOWKV_INVALID_IMAGE = 4, /* no saved sequence, a damaged one, or one of another cache */
    LOWKV_OVER_BUDGET = 5,
    LOWKV_OUT_OF_MEMORY = 6,
    LOWKV_FAILED = 7
} lowkv_status;

enum { LOWKV_DTYPE_F32 = 1, LOWKV_DTYPE_F16 = 2, LOWKV_DTYPE_BF16 = 3 };
typedef uint32_t lowkv_dtype; /* one of these */

typedef struct lowkv_cache lowkv_cache;
typedef uint32_t lowkv_sequence; /* a sequence's number in its cache */

typedef struct lowkv_config {
    size_t size;        /* sizeof(lowkv_config) */
    const char* scheme; /* "lowkv2.8", "lowkv2,window=64", ...; NULL: the default. Layers of their
                           own: layer.0=lowkv4 */
    uint32_t layers;
    uint32_t kv_heads;
    uint32_t head_dim; /* a multiple of 16, at most 576 */
    lowkv_dtype dtype; /* of unquantized tokens in memory; 0: f16 */
    uint32_t threads;  /* that work on a call, the caller's among them; 0: 1 */
    uint64_t budget;   /* bytes of all sequences at most; 0: no limit */
} lowkv_config;

/* Keys or values of some tokens, [token][head][channel]: strides in elements, a head's channels
 * side by side. Both strides 0: all is side by side. Else heads may not overlap. */
typedef struct lowkv_rows {
    const void* data;
    lowkv_dtype dtype;
    size_t token_stride, head_stride;
} lowkv_rows;

/* Newest `tokens` query tokens of a sequence, over all of its tokens. */
typedef struct lowkv_attention {
    size_t size; /* sizeof(lowkv_attention) */
    lowkv_sequence sequence;
    uint32_t tokens;
    uint32_t heads; /* a multiple of kv_heads: query head h reads kv head h / (heads / kv_heads) */
    const float* q; /* [token][head][channel]; strides in floats, 0 as in lowkv_rows */
    size_t q_token_stride, q_head_stride;
    float* out; /* [token][head][channel], too */
    size_t out_token_stride, out_head_stride;
    float* lse;      /* the logarithm of each softmax's denominator, [token][head], or NULL */
    int causal;      /* a token sees those up to itself; 0: all */
    uint32_t window; /* causal: no more than so many, itself included; 0: all */
    /* Added to the scores, times the head's ALiBi slope if there are any, or NULL: f32
     * [token][token of the sequence], a row `mask_stride` floats behind the other. -inf hides a
     * token. With a mask, causal must be 0. */
    const float* mask;
    size_t mask_stride;
} lowkv_attention;

/* What all attentions of a call share. */
typedef struct lowkv_attention_params {
    size_t size;   /* sizeof(lowkv_attention_params) */
    float scale;   /* multiplies q.k; 0: 1 / sqrt(head_dim) */
    float softcap; /* c > 0: score = c * tanh(score / c) */
    /* One per query head, or NULL. If causal, -slope * distance is added to a score; slopes above 0
     * multiply a mask; else they do nothing. */
    const float* alibi_slopes;
    const float*
        sink_logits; /* one per query head, or NULL: takes part in the softmax without a value */
} lowkv_attention_params;

typedef struct lowkv_bytes {
    uint64_t unquantized, packed; /* now */
    uint64_t peak;                /* of both together, highest so far */
} lowkv_bytes;

LOWKV_API uint32_t lowkv_api_version(void);
LOWKV_API const char* lowkv_version(void); /* "0.2.0" */
LOWKV_API const char* lowkv_default_scheme(void);
LOWKV_API const char* lowkv_error(
    void); /* what was wrong with this thread's last call that failed, and what would be right */

LOWKV_API lowkv_status lowkv_cache_new(const lowkv_config* config, lowkv_cache** cache);
LOWKV_API void lowkv_cache_free(lowkv_cache* cache);

/* An empty one; one with the tokens of another, whose blocks both share until one of them writes.
 */
LOWKV_API lowkv_status lowkv_sequence_add(lowkv_cache* cache, lowkv_sequence* sequence);
LOWKV_API lowkv_status lowkv_sequence_fork(lowkv_cache* cache, lowkv_sequence from,
                                           lowkv_sequence* sequence);
LOWKV_API lowkv_status lowkv_sequence_remove(lowkv_cache* cache, lowkv_sequence sequence);

/* How many tokens a layer has; drops those from `tokens` on, in all layers. */
LOWKV_API lowkv_status lowkv_sequence_tokens(const lowkv_cache* cache, lowkv_sequence sequence,
                                             uint32_t layer, uint32_t* tokens);
LOWKV_API lowkv_status lowkv_sequence_truncate(lowkv_cache* cache, lowkv_sequence sequence,
                                               uint32_t tokens);

LOWKV_API lowkv_status lowkv_append(lowkv_cache* cache, lowkv_sequence sequence, uint32_t layer,
                                    lowkv_rows keys, lowkv_rows values, uint32_t tokens);

/* Of `count` sequences of a layer at once. params NULL: the defaults. */
LOWKV_API lowkv_status lowkv_attend(lowkv_cache* cache, uint32_t layer,
                                    const lowkv_attention* attentions, uint32_t count,
                                    const lowkv_attention_params* params);

/* Packs what has left the windows, in all layers of all sequences. Where it fails (out of memory),
 * some are packed; called again, it goes on with the others. */
LOWKV_API lowkv_status lowkv_pack(lowkv_cache* cache);

/* Tokens [first, first + tokens) of a layer as f32 [token][head][channel], side by side; decoded
 * where they are packed. keys or values may be NULL. */
LOWKV_API lowkv_status lowkv_read(const lowkv_cache* cache, lowkv_sequence sequence, uint32_t layer,
                                  uint32_t first, uint32_t tokens, float* keys, float* values);

LOWKV_API lowkv_status lowkv_cache_bytes(const lowkv_cache* cache, lowkv_bytes* bytes);

/* A sequence as bytes for a file or another process, about as many as it takes in memory; to be
 * freed with lowkv_free(). A cache of the same scheme and shape takes them back, packed as they
 * were, and goes on as the saved one would have. */
LOWKV_API lowkv_status lowkv_save(const lowkv_cache* cache, lowkv_sequence sequence, void** data,
                                  size_t* size);
LOWKV_API lowkv_status lowkv_load(lowkv_cache* cache, const void* data, size_t size,
                                  lowkv_sequence* sequence);
LOWKV_API void lowkv_free(void* data);

/* NOLINTEND(modernize-use-using) */

#ifdef __cplusplus
}
#endif

#endif
