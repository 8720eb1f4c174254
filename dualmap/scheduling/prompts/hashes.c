/* Hashes of a prompt's blocks, as dualmap/scheduling/prompts/blocks.py computes them: hash k is XXH3 (64 bits) of block
 * k, with hash k - 1 as the seed.
 *
 * XXH3 stands here because the package that Python takes it from has no interface for C. It is written after the
 * description of the algorithm (xxHash 0.8), for machines whose words begin with their low byte; the tests compare it
 * with that package for all lengths and seeds.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if !defined(__SIZEOF_INT128__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Python hashes on this machine"
#endif

/* XXH3 ----------------------------------------------------------------------------------------------------------- */
#define SECRET_BYTES 192
#define STRIPE_BYTES 64
#define STRIPES 16     /* of a part of a long text, behind which the sums are mixed */
#define MIDDLE_BYTES 240 /* longest text that has no stripes */
#define LANES 8

static const uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
static const uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9,
                      P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;

static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t word(const uint8_t *at) {
    uint64_t read;
    memcpy(&read, at, sizeof read);
    return read;
}

static inline uint32_t half_word(const uint8_t *at) {
    uint32_t read;
    memcpy(&read, at, sizeof read);
    return read;
}

static inline uint64_t rotated(uint64_t value, int bits) {
    return value << bits | value >> (64 - bits);
}

static inline uint64_t folded(uint64_t left, uint64_t right) {
    unsigned __int128 product = (unsigned __int128)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t hash) {
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9;
    return hash ^ hash >> 32;
}

static inline uint64_t older_avalanche(uint64_t hash) {
    hash ^= hash >> 33;
    hash *= P64_2;
    hash ^= hash >> 29;
    hash *= P64_3;
    return hash ^ hash >> 32;
}

static uint64_t hash_of_16(const uint8_t *data, size_t len, uint64_t seed) {
    if (len > 8) {
        uint64_t low = word(data) ^ ((word(SECRET + 24) ^ word(SECRET + 32)) + seed);
        uint64_t high = word(data + len - 8) ^ ((word(SECRET + 40) ^ word(SECRET + 48)) - seed);
        return avalanche(len + __builtin_bswap64(low) + high + folded(low, high));
    }
    if (len >= 4) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t both = half_word(data + len - 4) + ((uint64_t)half_word(data) << 32);
        uint64_t hash = both ^ ((word(SECRET + 8) ^ word(SECRET + 16)) - seed);
        hash ^= rotated(hash, 49) ^ rotated(hash, 24);
        hash *= 0x9FB21C651E98DF25;
        hash ^= (hash >> 35) + len;
        hash *= 0x9FB21C651E98DF25;
        return hash ^ hash >> 28;
    }
    if (len) {
        uint32_t all = (uint32_t)data[0] << 16 | (uint32_t)data[len >> 1] << 24 | data[len - 1] | (uint32_t)len << 8;
        return older_avalanche(all ^ ((uint64_t)(half_word(SECRET) ^ half_word(SECRET + 4)) + seed));
    }
    return older_avalanche(seed ^ word(SECRET + 56) ^ word(SECRET + 64));
}

static inline uint64_t mixed(const uint8_t *data, const uint8_t *secret, uint64_t seed) {
    return folded(word(data) ^ (word(secret) + seed), word(data + 8) ^ (word(secret + 8) - seed));
}

static uint64_t hash_of_240(const uint8_t *data, size_t len, uint64_t seed) {
    uint64_t sum = len * P64_1;
    if (len <= 128) {
        for (size_t pair = (len - 1) / 32 + 1; pair-- > 0;)
            sum += mixed(data + 16 * pair, SECRET + 32 * pair, seed) +
                   mixed(data + len - 16 * (pair + 1), SECRET + 32 * pair + 16, seed);
        return avalanche(sum);
    }
    for (size_t part = 0; part < 8; part++)
        sum += mixed(data + 16 * part, SECRET + 16 * part, seed);
    sum = avalanche(sum);
    for (size_t part = 8; part < len / 16; part++)
        sum += mixed(data + 16 * part, SECRET + 16 * (part - 8) + 3, seed);
    return avalanche(sum + mixed(data + len - 16, SECRET + 136 - 17, seed));
}

static inline void add_stripe(uint64_t *sums, const uint8_t *data, const uint8_t *secret) {
#ifdef __SSE2__
    for (int lane = 0; lane < LANES; lane += 2) {
        __m128i *both = (__m128i *)(sums + lane);
        __m128i value = _mm_loadu_si128((const __m128i *)(data + 8 * lane));
        __m128i key = _mm_xor_si128(value, _mm_loadu_si128((const __m128i *)(secret + 8 * lane)));
        __m128i product = _mm_mul_epu32(key, _mm_srli_epi64(key, 32));
        __m128i swapped = _mm_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
        _mm_storeu_si128(both, _mm_add_epi64(_mm_add_epi64(_mm_loadu_si128(both), product), swapped));
    }
#else
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t value = word(data + 8 * lane), key = value ^ word(secret + 8 * lane);
        sums[lane ^ 1] += value;
        sums[lane] += (key & 0xFFFFFFFF) * (key >> 32);
    }
#endif
}

static uint64_t hash_of_long(const uint8_t *data, size_t len, uint64_t seed) {
    uint8_t secret[SECRET_BYTES];
    for (int at = 0; at < SECRET_BYTES; at += 16) {
        uint64_t plus = word(SECRET + at) + seed, minus = word(SECRET + at + 8) - seed;
        memcpy(secret + at, &plus, 8);
        memcpy(secret + at + 8, &minus, 8);
    }
    uint64_t sums[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    size_t stripes = (len - 1) / STRIPE_BYTES;
    for (size_t stripe = 0; stripe < stripes; stripe++) {
        add_stripe(sums, data + STRIPE_BYTES * stripe, secret + 8 * (stripe % STRIPES));
        if (stripe % STRIPES == STRIPES - 1)
            for (int lane = 0; lane < LANES; lane++) {
                uint64_t sum = sums[lane];
                sums[lane] = (sum ^ sum >> 47 ^ word(secret + SECRET_BYTES - STRIPE_BYTES + 8 * lane)) * P32_1;
            }
    }
    add_stripe(sums, data + len - STRIPE_BYTES, secret + SECRET_BYTES - STRIPE_BYTES - 7);
    uint64_t hash = len * P64_1;
    for (int lane = 0; lane < LANES; lane += 2)
        hash += folded(sums[lane] ^ word(secret + 11 + 8 * lane), sums[lane + 1] ^ word(secret + 19 + 8 * lane));
    return avalanche(hash);
}

static uint64_t hash_of(const uint8_t *data, size_t len, uint64_t seed) {
    if (len <= 16)
        return hash_of_16(data, len, seed);
    return len <= MIDDLE_BYTES ? hash_of_240(data, len, seed) : hash_of_long(data, len, seed);
}

/* Python --------------------------------------------------------------------------------------------------------- */
static PyObject *hashes_of(const uint8_t *data, size_t len, uint64_t seed, size_t block_bytes) {
    size_t blocks = len / block_bytes;
    PyObject *hashes = PyTuple_New((Py_ssize_t)(blocks ? blocks : 1)), *tail = NULL;
    if (hashes == NULL)
        return NULL;
    for (size_t block = 0; block < blocks; block++) {
        seed = hash_of(data + block * block_bytes, block_bytes, seed);
        PyObject *hash = PyLong_FromUnsignedLongLong(seed);
        if (hash == NULL || PyTuple_SetItem(hashes, (Py_ssize_t)block, hash) < 0)
            goto failed;
    }
    size_t rest = len - blocks * block_bytes;
    if (rest || !blocks) {
        PyObject *hash = PyLong_FromUnsignedLongLong(hash_of(data + blocks * block_bytes, rest, seed));
        if (hash == NULL)
            goto failed;
        if (blocks)
            tail = hash;
        else if (PyTuple_SetItem(hashes, 0, hash) < 0)
            goto failed;
    }
    if (tail == NULL) {
        Py_INCREF(Py_None);
        tail = Py_None;
    }
    return Py_BuildValue("(NN)", hashes, tail);
failed:
    Py_DECREF(hashes);
    return NULL;
}

static PyObject *prefix_hashes(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer data;
    PyObject *number;
    Py_ssize_t block_bytes;
    if (!PyArg_ParseTuple(args, "y*O!n", &data, &PyLong_Type, &number, &block_bytes))
        return NULL;
    PyObject *made = NULL;
    uint64_t seed = PyLong_AsUnsignedLongLong(number);
    if (block_bytes < 1)
        PyErr_SetString(PyExc_ValueError, "a block has at least one byte");
    else if (!PyErr_Occurred())
        made = hashes_of(data.buf, (size_t)data.len, seed, (size_t)block_bytes);
    PyBuffer_Release(&data);
    return made;
}

static PyMethodDef functions[] = {
    {"prefix_hashes", prefix_hashes, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "dualmap.scheduling.prompts._hashes",
    .m_methods = functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__hashes(void) {
    return PyModuleDef_Init(&module);
}
