// The formats of codes for which kernels are made: those of the engine.
#pragma once

#include "unit_rows.cuh"

#if !defined(INGOT_WEIGHT_IS_F32) && defined(INGOT_CODES)

// Calls each(name, rows) for the formats of the engine's codes.
#define INGOT_FOR_CODES(each) INGOT_IF_W8(each) INGOT_IF_W4(each) INGOT_FOR_KEPT_CODES(each)
#define INGOT_FOR_KEPT_CODES(each) \
  INGOT_IF_W2T(each)               \
  INGOT_IF_W3T(each)               \
  INGOT_IF_W4T(each) INGOT_IF_W4TS(each) INGOT_IF_W8T(each) INGOT_IF_W8TS(each) INGOT_FOR_UNITS(each) INGOT_IF_F8(each)
#define INGOT_FOR_UNITS(each) \
  INGOT_IF_W2KS(each) INGOT_IF_W3K(each) INGOT_IF_W4KS(each) INGOT_IF_W5KS(each) INGOT_IF_W6K(each)
#ifdef INGOT_CODES_W8
#define INGOT_IF_W8(each) each(w8, RowW8)
#else
#define INGOT_IF_W8(each)
#endif
#ifdef INGOT_CODES_W4
#define INGOT_IF_W4(each) each(w4, RowW4)
#else
#define INGOT_IF_W4(each)
#endif
#ifdef INGOT_CODES_W2T
#define INGOT_IF_W2T(each) each(w2t, RowW2t)
#else
#define INGOT_IF_W2T(each)
#endif
#ifdef INGOT_CODES_W3T
#define INGOT_IF_W3T(each) each(w3t, RowW3t)
#else
#define INGOT_IF_W3T(each)
#endif
#ifdef INGOT_CODES_W4T
#define INGOT_IF_W4T(each) each(w4t, RowW4t)
#else
#define INGOT_IF_W4T(each)
#endif
#ifdef INGOT_CODES_W4TS
#define INGOT_IF_W4TS(each) each(w4ts, RowW4ts)
#else
#define INGOT_IF_W4TS(each)
#endif
#ifdef INGOT_CODES_W8T
#define INGOT_IF_W8T(each) each(w8t, RowW8t)
#else
#define INGOT_IF_W8T(each)
#endif
#ifdef INGOT_CODES_W8TS
#define INGOT_IF_W8TS(each) each(w8ts, RowW8ts)
#else
#define INGOT_IF_W8TS(each)
#endif
#ifdef INGOT_CODES_W2KS
#define INGOT_IF_W2KS(each) each(w2ks, RowW2ks)
#else
#define INGOT_IF_W2KS(each)
#endif
#ifdef INGOT_CODES_W3K
#define INGOT_IF_W3K(each) each(w3k, RowW3k)
#else
#define INGOT_IF_W3K(each)
#endif
#ifdef INGOT_CODES_W4KS
#define INGOT_IF_W4KS(each) each(w4ks, RowW4ks)
#else
#define INGOT_IF_W4KS(each)
#endif
#ifdef INGOT_CODES_W5KS
#define INGOT_IF_W5KS(each) each(w5ks, RowW5ks)
#else
#define INGOT_IF_W5KS(each)
#endif
#ifdef INGOT_CODES_W6K
#define INGOT_IF_W6K(each) each(w6k, RowW6k)
#else
#define INGOT_IF_W6K(each)
#endif
#ifdef INGOT_CODES_F8
#define INGOT_IF_F8(each) each(f8, RowF8)
#else
#define INGOT_IF_F8(each)
#endif

#else
#define INGOT_FOR_CODES(each)
#define INGOT_FOR_KEPT_CODES(each)
#endif
